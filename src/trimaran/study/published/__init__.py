"""Published tables measured on this machine, mapped down by a stated rule."""
