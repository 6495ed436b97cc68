"""What the voice answers by rule, because a language model of 135 M parameters cannot: see :mod:`.table`."""
