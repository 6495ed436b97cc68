"""KV memory of world sessions: who owns which page, how much fits, where the bytes lie, and attention over them.

``blocks``, ``window``, ``capacity``, ``cross`` and ``manager`` are pure: no tensor, clock, thread or randomness, so
every rule about memory can be tested exhaustively without a device. ``storage`` and ``attention`` hold the tensors
and know nothing of sessions. The one promise that the rest of the server builds on: **a committed page is never
written again**, so a failed tick leaves the committed world as it was, and a fork needs no copy.
"""
