"""The graph server and its clients: Arrow Flight between processes, so that where a part lives is a detail."""
