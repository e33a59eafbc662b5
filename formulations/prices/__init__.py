"""The one price list: what every formulation takes a transfer and a collective to cost."""
