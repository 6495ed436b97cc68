"""The duplex session: pure machines for what is heard, said, played and interrupted. Time comes in as a number."""
