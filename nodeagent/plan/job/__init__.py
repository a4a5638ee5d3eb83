"""The next step of one job: form, re-form, hold, pause, end, or wait, and why."""
