"""Streams and events: handles as in torch.cuda, and what a device does with them."""
