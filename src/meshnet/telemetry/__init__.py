"""Generation Telemetry: what each generation returns about itself. The schema is documented in docs/telemetry.md."""
