"""Processes: who decides, who carries out, who keeps them; never imports torch."""
