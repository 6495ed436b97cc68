"""MiniCPM-o's own vocoder, Step-Audio 2's token2wav: codes become a mel spectrogram by flow matching, and that sound."""
