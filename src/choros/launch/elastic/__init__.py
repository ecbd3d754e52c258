"""Elastic jobs: ranks and hosts join and leave while a job runs."""
