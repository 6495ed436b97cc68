"""Real-time chunking: how a new chunk of actions continues the one that is being executed.

While the network computes, the robot goes on with the old chunk; when the new one arrives, ``delay`` actions of it are
already in the past. Each module here is one way to make both agree, as a step rule of the flow loop or as arithmetic on
finished chunks. Pure: no clock, no session, no network of its own. All of it happens in normalised model space.

Indices count from the observation's tick: action 0 of a new chunk belongs to the tick at which its observation was taken.
"""
