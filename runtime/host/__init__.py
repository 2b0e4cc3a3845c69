"""The embedded device: streams, pools and graphs over ordinary memory."""
