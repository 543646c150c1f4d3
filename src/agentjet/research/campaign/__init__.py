"""Campaigns: a tree of studies on one subject, from a topic to a report. `campaign.py` has the loop.

Campaign ── Trial, Outcome   a run of one commit: curve, signals, transcripts
   │        └── Intervention   a change of the subject, with its reason and its prediction
   │             └── Study       the judge's comparison of two commits
   └── base commit: the subject with every change that was confirmed
"""
