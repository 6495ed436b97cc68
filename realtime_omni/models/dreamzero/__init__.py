"""DreamZero (GEAR-Dreams, Apache-2.0 code): one video model that imagines what a robot will see and what it should do."""
