"""A plan as text, tables, pages and pictures: functions of a plan, which its methods call."""
