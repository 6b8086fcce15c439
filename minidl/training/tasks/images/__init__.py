"""`minidl train images`: a convolutional network on pictures of one size."""

from minidl.training.tasks.images.answers import PictureClassifier
from minidl.training.tasks.images.pictures import PictureFormat, PictureTask
from minidl.training.tasks.images.settings import ImageSession, TrainImages
from minidl.training.tasks.images.task import ImagesTask

__all__ = ["ImageSession", "ImagesTask", "PictureClassifier", "PictureFormat", "PictureTask", "TrainImages"]
