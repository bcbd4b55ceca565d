"""Reports about simdev itself: fidelity, the effect of rules and costs, reproduced papers, and speed."""
