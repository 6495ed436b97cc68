"""A scripted duplex model: it says given lines in tones, hears by energy, and gives way or insists."""
