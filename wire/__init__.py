"""The protocol, for both roles: frames, messages, layouts, codecs, connections."""
