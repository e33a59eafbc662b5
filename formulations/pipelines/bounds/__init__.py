"""Lower bounds on plans of pipelines, and the relaxations behind them."""
