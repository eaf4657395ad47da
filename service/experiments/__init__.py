"""Named speculation profiles and A/B experiments on live traffic."""
