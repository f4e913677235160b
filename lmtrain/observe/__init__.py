"""What a run says about itself: metrics, event files, throughput, the live view."""
