"""What tests, benches and the quickstart share: a real daemon under control."""
