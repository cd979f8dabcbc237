"""Plans: budgets, homes of states, their bytes, and shortfalls."""
