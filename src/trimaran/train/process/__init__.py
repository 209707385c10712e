"""The process of a rank: how it begins, is forked and ends."""
