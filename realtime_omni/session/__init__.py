"""Sessions: pure state machines with no clock, socket, thread or tensor."""
