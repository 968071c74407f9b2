"""The process that hosts one rank: actor, engine, state. Knows orders and reports, no controller."""
