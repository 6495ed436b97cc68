"""One model over several processes of one host: who is which rank, what they exchange, and who lives. Knows no model."""
