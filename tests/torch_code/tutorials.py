"""Programs as torch's tutorials have them, each written once: `f` is torch or minidl. They return 20 losses or more."""

from pathlib import Path

import torch as plain
from torch.utils.data import DataLoader, TensorDataset


def drawn(*shape, seed=0):
    return plain.randn(shape, generator=plain.Generator().manual_seed(seed), dtype=plain.float64)


def pictures(f, count, size=8, channels=1, classes=4):
    """Noise with a bright row that tells the class."""
    labels = plain.arange(count) % classes
    images = 0.3 * drawn(count, channels, size, size)
    images[plain.arange(count), :, labels * size // classes] += 1.0
    return images.to(f.dtype), labels


def mlp(f, folder):
    """Quickstart: an MLP on pictures of digits from a DataLoader."""
    images, labels = pictures(f, 64)
    loader = DataLoader(
        TensorDataset(images, labels), batch_size=16, shuffle=True, generator=plain.Generator().manual_seed(1)
    )

    class NeuralNetwork(f.nn.Module):
        def __init__(self):
            super().__init__()
            self.flatten = f.nn.Flatten()
            self.stack = f.nn.Sequential(
                f.nn.Linear(64, 32), f.nn.ReLU(), f.nn.Linear(32, 32), f.nn.ReLU(), f.nn.Linear(32, 4)
            )

        def forward(self, x):
            return self.stack(self.flatten(x))

    model = f.begun(NeuralNetwork())
    optimizer = f.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        model.train()
        for x, y in loader:
            x, y = x.to(f.device), y.to(f.device)
            loss = f.F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def cnn(f, folder):
    """A classifier of pictures: convolutions, pools, Adam."""

    class Net(f.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = f.nn.Conv2d(3, 6, 3, padding=1)
            self.pool = f.nn.MaxPool2d(2, 2)
            self.conv2 = f.nn.Conv2d(6, 8, 3)
            self.fc1 = f.nn.Linear(8, 16)
            self.fc2 = f.nn.Linear(16, 4)

        def forward(self, x):
            x = self.pool(f.F.relu(self.conv1(x)))
            x = self.pool(f.F.relu(self.conv2(x)))
            x = x.flatten(1)
            return self.fc2(f.F.relu(self.fc1(x)))

    net = f.begun(Net())
    criterion = f.nn.CrossEntropyLoss()
    optimizer = f.optim.Adam(net.parameters(), lr=0.01, betas=(0.9, 0.99))
    images, labels = pictures(f, 32, channels=3)
    images, labels = f.tensor(images), f.tensor(labels)
    losses = []
    for step in range(20):
        part = slice(8 * (step % 4), 8 * (step % 4) + 8)
        optimizer.zero_grad()
        loss = criterion(net(images[part]), labels[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def dcgan(f, folder):
    """Steps of a DCGAN: two networks, two optimisers, gradients of the generator through the discriminator."""
    generator = f.begun(
        f.nn.Sequential(
            f.nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False), f.nn.BatchNorm2d(8), f.nn.ReLU(),
            f.nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), f.nn.Tanh(),
        )
    )  # fmt: skip
    discriminator = f.begun(
        f.nn.Sequential(
            f.nn.Conv2d(1, 8, 4, 2, 1, bias=False), f.nn.LeakyReLU(0.2),
            f.nn.Conv2d(8, 1, 4, 1, 0, bias=False), f.nn.Sigmoid(), f.nn.Flatten(0),
        )
    )  # fmt: skip
    optimizer_d, optimizer_g = (
        f.optim.Adam(network.parameters(), lr=2e-3, betas=(0.5, 0.999)) for network in (discriminator, generator)
    )
    criterion = f.nn.BCELoss()
    real, _ = pictures(f, 8)
    real, ones, zeros = f.tensor(real), f.tensor(plain.ones(8)), f.tensor(plain.zeros(8))
    losses = []
    for step in range(20):
        discriminator.zero_grad()
        noise = f.tensor(drawn(8, 6, 1, 1, seed=step))
        fake = generator(noise)
        loss_real = criterion(discriminator(real), ones)
        loss_real.backward()
        loss_fake = criterion(discriminator(fake.detach()), zeros)
        loss_fake.backward()
        optimizer_d.step()
        generator.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
        losses.append(loss_real.item() + loss_fake.item() + loss_g.item())
    return losses


def resnet(f, folder):
    """A residual network, with SGD as ResNets are trained and a StepLR."""

    class BasicBlock(f.nn.Module):
        def __init__(self, inputs, outputs, stride=1):
            super().__init__()
            self.conv1 = f.nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.bn1 = f.nn.BatchNorm2d(outputs)
            self.relu = f.nn.ReLU()
            self.conv2 = f.nn.Conv2d(outputs, outputs, kernel_size=3, stride=1, padding=1, bias=False)
            self.bn2 = f.nn.BatchNorm2d(outputs)
            self.downsample = f.nn.Sequential(
                f.nn.Conv2d(inputs, outputs, 1, stride, bias=False), f.nn.BatchNorm2d(outputs)
            )

        def forward(self, x):
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            return self.relu(out + self.downsample(x))

    model = f.begun(f.nn.Sequential(BasicBlock(1, 8, 2), f.nn.AdaptiveAvgPool2d(1), f.nn.Flatten(), f.nn.Linear(8, 4)))
    optimizer = f.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = f.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    images, labels = map(f.tensor, pictures(f, 16))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = f.F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def text(f, folder):
    """Texts as means of the embeddings of their words."""
    words = plain.randint(50, (24, 12), generator=plain.Generator().manual_seed(2))
    labels = f.tensor((words < 20).sum(1).gt(5).to(plain.int64))

    class Classifier(f.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = f.nn.Embedding(50, 16)
            self.norm = f.nn.LayerNorm(16)
            self.fc = f.nn.Linear(16, 2)

        def forward(self, words):
            return self.fc(self.norm(self.embedding(words).mean(1)))

    words = f.tensor(words)
    model = f.begun(Classifier())
    optimizer = f.optim.Adagrad(model.parameters(), lr=0.3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = f.F.cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def autoencoder(f, folder):
    """Pictures through a bottleneck and back."""
    images, _ = pictures(f, 16)
    x = f.tensor(images.flatten(1))
    encoder = f.begun(f.nn.Sequential(f.nn.Linear(64, 16), f.nn.GELU(), f.nn.Linear(16, 3)))
    decoder = f.begun(f.nn.Sequential(f.nn.Linear(3, 16), f.nn.SiLU(), f.nn.Linear(16, 64)))
    criterion = f.nn.MSELoss()
    optimizer = f.optim.RMSprop([*encoder.parameters(), *decoder.parameters()], lr=3e-3, momentum=0.5)
    losses = []
    for _ in range(20):
        loss = criterion(decoder(encoder(x)), x)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def transfer(f, folder):
    """A trained network's layers are kept as they are, its last one is a new one."""
    model = f.begun(
        f.nn.Sequential(
            f.nn.Conv2d(1, 8, 3), f.nn.BatchNorm2d(8), f.nn.ReLU(), f.nn.AdaptiveAvgPool2d((6, 1)), f.nn.Flatten(),
            f.nn.Linear(48, 10),
        )
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.requires_grad = False
    model[5] = f.begun(f.nn.Linear(48, 4))
    model.eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = f.optim.AdamW(trained, lr=1e-3, weight_decay=0.05)
    scheduler = f.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=21)
    images, labels = map(f.tensor, pictures(f, 16))
    kept = model[0].weight.detach().tolist()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = f.F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert model[0].weight.tolist() == kept
    assert model[0].weight.grad is None
    return losses


def saved(f, folder: Path):
    """A run that stops after ten steps and goes on from its file, with a new model and optimiser."""
    x = f.tensor(drawn(16, 6))
    y = f.tensor(drawn(16, 2, seed=1))

    def made():
        model = f.begun(f.nn.Sequential(f.nn.Linear(6, 12), f.nn.Tanh(), f.nn.Linear(12, 2)))
        return model, f.optim.Adam(model.parameters(), lr=0.02, amsgrad=True)

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = f.F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    losses = []
    model, optimizer = made()
    train(model, optimizer, 10)
    path = folder / "checkpoint"
    f.torch.save(
        {"epoch": 10, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, path
    )
    model, optimizer = made()
    checkpoint = f.torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    train(model, optimizer, checkpoint["epoch"])
    return losses


def by_hand(f, folder):
    """Linear regression without optimisers: gradients, and weights changed under no_grad."""
    x, y = f.tensor(drawn(32, 5)), f.tensor(drawn(32, 1, seed=1))
    weight, bias = f.tensor(drawn(5, 1, seed=2)), f.tensor(drawn(1, seed=3))
    for parameter in (weight, bias):
        parameter.requires_grad_()
    losses = []
    for _ in range(20):
        loss = ((x @ weight + bias - y) ** 2).mean()
        loss.backward()
        with f.torch.no_grad():
            for parameter in (weight, bias):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses


def clipped(f, folder):
    """Steps of bounded length, in which gradients add up over two batches."""
    x, y = f.tensor(drawn(16, 6)), f.tensor(5 * drawn(16, 1, seed=1))
    model = f.begun(f.nn.Sequential(f.nn.Linear(6, 12), f.nn.ReLU(), f.nn.Linear(12, 1)))
    optimizer = f.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        for half in (slice(0, 8), slice(8, 16)):
            loss = f.F.mse_loss(model(x[half]), y[half]) / 2
            loss.backward()
        f.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def wgan_gp(f, folder):
    """A WGAN with the penalty on the gradient between true and made pictures, which is differentiated again."""
    generator = f.begun(
        f.nn.Sequential(
            f.nn.ConvTranspose2d(6, 8, 4, 1, 0), f.nn.ReLU(True), f.nn.ConvTranspose2d(8, 1, 4, 2, 1), f.nn.Tanh()
        )
    )
    critic = f.begun(
        f.nn.Sequential(
            f.nn.Conv2d(1, 8, 4, 2, 1), f.nn.LeakyReLU(0.2, inplace=True),
            f.nn.Conv2d(8, 8, 3, 1, 1), f.nn.InstanceNorm2d(8, affine=True), f.nn.LeakyReLU(0.2, inplace=True),
            f.nn.Flatten(), f.nn.Linear(128, 1),
        )
    )  # fmt: skip
    optimizer_g = f.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optimizer_d = f.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    real = f.tensor(pictures(f, 8)[0])

    def gradient_penalty(real, fake, seed):
        alpha = f.tensor(drawn(8, 1, 1, 1, seed=seed).sigmoid())
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        judged = critic(between)
        gradients = f.torch.autograd.grad(
            outputs=judged, inputs=between, grad_outputs=f.torch.ones_like(judged), create_graph=True,
            retain_graph=True, only_inputs=True,
        )[0]  # fmt: skip
        gradients = gradients.view(gradients.size(0), -1)
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    losses = []
    for step in range(20):
        fake = generator(f.tensor(drawn(8, 6, 1, 1, seed=step)))
        optimizer_d.zero_grad()
        penalty = gradient_penalty(real.detach(), fake.detach(), 100 + step)
        loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        optimizer_d.step()
        losses.append(loss.item())
        if step % 5 == 4:
            optimizer_g.zero_grad()
            (-critic(generator(f.tensor(drawn(8, 6, 1, 1, seed=200 + step)))).mean()).backward()
            optimizer_g.step()
    return losses


def maml(f, folder):
    """Weights from which one step of SGD fits a new sine: gradients through that step."""
    shapes = {"w1": (16, 1), "b1": (16,), "w2": (16, 16), "b2": (16,), "w3": (1, 16), "b3": (1,)}
    weights = {
        name: f.tensor(drawn(*shape, seed=i) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }
    optimizer = f.optim.Adam(list(weights.values()), lr=0.01)

    def forward(x, p):
        x = f.F.relu(f.F.linear(x, p["w1"], p["b1"]))
        x = f.torch.tanh(f.F.linear(x, p["w2"], p["b2"]))
        return f.F.linear(x, p["w3"], p["b3"])

    losses = []
    for step in range(20):
        total = 0.0
        for task in range(2):
            x = 2 * drawn(10, 1, seed=1000 * task + step)
            y = (x + task).sin() + task
            x, y = f.tensor(x), f.tensor(y)
            loss = f.F.mse_loss(forward(x[:5], weights), y[:5])
            gradients = f.torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            adapted = {
                name: w - 0.05 * gradient for (name, w), gradient in zip(weights.items(), gradients, strict=True)
            }
            total = total + f.F.mse_loss(forward(x[5:], adapted), y[5:])
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


TUTORIALS = (mlp, cnn, dcgan, resnet, text, autoencoder, transfer, saved, by_hand, clipped, wgan_gp, maml)
