"""Token datasets on disk: .bin/.idx files, their documents and cached indexes."""
