"""The command line: its options, and other servers' lines translated."""
