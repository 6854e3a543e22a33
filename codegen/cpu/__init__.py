"""CPU targets, object code and the flat image."""
