"""The graph server and its clients, which exchange messages over sockets. `docs/protocol.md` describes them."""
