"""Matrix-Game 2: a world model of the Wan family that keyboard and mouse steer, without text."""
