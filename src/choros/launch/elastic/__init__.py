"""Elastic jobs: hosts join and leave while a job runs."""
