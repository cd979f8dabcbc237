"""What a plan is: budgets, homes, bytes, and what it lacks."""
