"""A captured graph, measured: node by node, its critical path, as text, picture and dict."""
