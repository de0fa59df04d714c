"""Run one program over several devices and hosts."""
