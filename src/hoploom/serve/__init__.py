"""The graph server and its clients: messages over sockets, so that where a part lives is a detail."""
