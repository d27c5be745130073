"""What people see: tables, figures and pages, made from files and results, never from running anything."""
