"""The engine as a process of the operating system: start, watch, stop, and what it leaves."""
