"""Block drafters that follow DFlash, and the parts that several of them share."""
