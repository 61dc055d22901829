"""Policy without clock and transport: choosing routes, placing layers, predicting times."""
