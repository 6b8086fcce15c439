"""`minidl train images`: a convolutional network on pictures of one size.

Read `settings` and `task` first, then `networks`, `start` (initial weights), `course`, `pictures`, `answers` and `cam`.
"""

# No __all__: these names are for the package itself, and no promise.
from minidl.training.tasks.images.answers import PictureClassifier as PictureClassifier
from minidl.training.tasks.images.pictures import PictureFormat as PictureFormat
from minidl.training.tasks.images.pictures import PictureTask as PictureTask
from minidl.training.tasks.images.settings import ImageSession as ImageSession
from minidl.training.tasks.images.settings import PictureSettings as PictureSettings
from minidl.training.tasks.images.settings import TrainImages as TrainImages
from minidl.training.tasks.images.task import ImagesTask as ImagesTask
