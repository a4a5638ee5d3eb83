"""From readings and events to verdicts: the rules and what becomes of one that fired. Pure: reads nothing itself."""
