"""What a call asks for, and what can stand against it."""
