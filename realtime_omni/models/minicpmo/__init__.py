"""MiniCPM-o 4.5 as a native full-duplex voice."""
