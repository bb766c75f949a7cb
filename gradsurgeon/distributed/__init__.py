"""The ranks that train one model: who they are, and how they find each other's rules."""
