"""Campaigns: a tree of studies on one subject, from a topic to a report. `campaign.py` has the loop."""
