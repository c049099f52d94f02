"""Pure decisions: told what happened, answers what to do. No I/O, no clock, no chance."""
