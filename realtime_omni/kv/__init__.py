"""KV memory: pages, windows and capacity (pure), and the storage behind them (torch)."""
