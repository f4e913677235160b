"""What is known of each setting: type, default, meaning, and which place has set its value."""
