"""The first hour with a card: probes in processes of their own, and a report of what they found."""
