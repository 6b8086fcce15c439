"""Programs of a torch user: `torch` is torch or minidl; `begin` gives a model the weights of the torch run.

They return the losses of three steps.
"""

import numpy as np


def data(torch, *shape, seed=0, high=None):
    """Normally distributed numbers, or whole numbers below `high`."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.standard_normal(shape) if high is None else random.integers(high, size=shape))


def train(optimizer, loss_of, steps=3):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def dcgan(torch, begin):
    nn, F = torch.nn, torch.nn.functional
    generator = begin(
        nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
        )
    )  # fmt: skip
    critic = begin(
        nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4),
            nn.Flatten(0),
        )
    )  # fmt: skip
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    real, losses = data(torch, 4, 1, 8, 8), []
    for step in range(3):
        fake = generator(data(torch, 4, 6, 1, 1, seed=step))
        optimizer_d.zero_grad()
        judged = critic(torch.cat([real, fake.detach()]))
        target = torch.cat([torch.full((4,), 0.9), torch.zeros(4)])
        loss = F.binary_cross_entropy_with_logits(judged, target)
        loss.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = F.softplus(-critic(fake)).mean()
        loss_g.backward()
        optimizer_g.step()
        losses += [loss.item(), loss_g.item()]
    return losses


def lstm_tagger(torch, begin):
    nn, F = torch.nn, torch.nn.functional

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 6, padding_idx=0)
            self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
            self.fc = nn.Linear(10, 3)

        def forward(self, words, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embedding(words), lengths, batch_first=True, enforce_sorted=False
            )
            out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.fc(out)

    lengths = [4, 6, 3]
    words = nn.utils.rnn.pad_sequence([data(torch, n, seed=n, high=10) + 1 for n in lengths], batch_first=True)
    tags = torch.where(words == 0, -1, words % 3)
    model = begin(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return train(
        optimizer,
        lambda step: F.cross_entropy(model(words, torch.tensor(lengths)).transpose(1, 2), tags, ignore_index=-1),
    )


def transformer_classifier(torch, begin):
    nn, F = torch.nn, torch.nn.functional

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 8)
            self.position = nn.Parameter(torch.zeros(1, 5, 8))
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 4)

        def forward(self, words):
            mask = words == 0
            x = self.encoder(self.embedding(words) + self.position, src_key_padding_mask=mask)
            x = self.norm(x).masked_fill(mask.unsqueeze(-1), 0.0)
            return self.head(x.sum(1) / (~mask).sum(1, keepdim=True))

    words = data(torch, 6, 5, high=9)
    words[:, 0] = 1
    model = begin(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(words), torch.arange(6) % 4, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def vae(torch, begin):
    nn, F = torch.nn, torch.nn.functional

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(12, 8)
            self.mu, self.logvar = nn.Linear(8, 2), nn.Linear(8, 2)
            self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ELU(), nn.Linear(8, 12))

        def forward(self, x, noise):
            h = F.elu(self.encoder(x))
            mu, logvar = self.mu(h), self.logvar(h)
            return self.decoder(mu + noise * torch.exp(0.5 * logvar)), mu, logvar

    x, model = torch.sigmoid(data(torch, 7, 12)), begin(VAE())

    def loss_of(step):
        y, mu, logvar = model(x, data(torch, 7, 2, seed=step))
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return F.binary_cross_entropy(torch.sigmoid(y), x, reduction="sum") + kl

    return train(torch.optim.Adam(model.parameters(), lr=1e-2), loss_of)


def siamese(torch, begin):
    nn = torch.nn
    net = begin(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.PReLU(), nn.Linear(8, 3)))
    criterion = nn.TripletMarginLoss(margin=1.0, p=2, swap=True)

    def loss_of(step):
        anchor, positive, negative = (
            torch.nn.functional.normalize(net(data(torch, 6, 5, seed=3 * step + i))) for i in range(3)
        )
        return criterion(anchor, positive, negative) + nn.PairwiseDistance()(anchor, positive).mean()

    return train(torch.optim.RMSprop(net.parameters(), lr=1e-2), loss_of)


def wgan_gp(torch, begin):
    nn = torch.nn
    critic = begin(
        nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(0.2), nn.Flatten(),
                      nn.Linear(64, 1))
    )  # fmt: skip

    def loss_of(step):
        real, fake = (data(torch, 3, 1, 8, 8, seed=10 * step + i) for i in range(2))
        between = (0.3 * real + 0.7 * fake).requires_grad_(True)
        score = critic(between)
        (gradient,) = torch.autograd.grad(score, between, grad_outputs=torch.ones_like(score), create_graph=True)
        penalty = ((gradient.reshape(len(gradient), -1).norm(2, dim=1) - 1) ** 2).mean()
        return critic(fake).mean() - critic(real).mean() + 10 * penalty

    return train(torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9)), loss_of)


def u_net(torch, begin):
    nn, F = torch.nn, torch.nn.functional

    def block(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.SiLU(),
        )  # fmt: skip

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList([block(1, 4), block(4, 8)])
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
            self.out = nn.ModuleDict({"block": block(8, 4), "head": nn.Conv2d(4, 2, 1)})
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])

        def forward(self, x):
            first = self.down[0](x) * self.scales[0]
            second = self.down[1](F.max_pool2d(first, 2)) * self.scales[1]
            joined = torch.cat([self.up(second), first], dim=1)
            return self.out["head"](self.out["block"](joined)) + F.interpolate(x, scale_factor=1).mean()

    model, x = begin(UNet()), data(torch, 2, 1, 8, 8)
    target = (x.squeeze(1) > 0).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    return train(optimizer, lambda step: F.cross_entropy(model(x), target, weight=torch.tensor([0.3, 0.7])))


def char_rnn(torch, begin):
    nn, F = torch.nn, torch.nn.functional

    class CharRNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn, self.fc = nn.Embedding(7, 5), nn.GRU(5, 6), nn.Linear(6, 7)

        def forward(self, x, hidden=None):
            out, hidden = self.rnn(self.embedding(x), hidden)
            return self.fc(out), hidden.detach()

    model, text, hidden = begin(CharRNN()), data(torch, 13, 2, high=7), None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(step):
        nonlocal hidden
        part = text[4 * step : 4 * step + 5]
        out, hidden = model(part[:-1], hidden)
        return F.nll_loss(F.log_softmax(out.flatten(0, 1), dim=-1), part[1:].reshape(-1))

    losses = train(optimizer, loss_of)
    with torch.no_grad():
        model.eval()
        return [*losses, float(F.softmax(model(text[:1])[0] / 0.8, dim=-1).max())]


def matrix_factorisation(torch, begin):
    nn, F = torch.nn, torch.nn.functional

    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(5, 4), nn.EmbeddingBag(9, 4, mode="sum")
            self.bias = nn.ParameterDict({"user": nn.Parameter(torch.zeros(5))})

        def forward(self, users, items, offsets):
            return (self.users(users) * self.items(items, offsets)).sum(1) + self.bias["user"][users]

    model, users = begin(Factors()), data(torch, 6, high=5)
    items, offsets, ratings = data(torch, 14, seed=1, high=9), torch.tensor([0, 2, 5, 7, 9, 12]), data(torch, 6, seed=2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return train(optimizer, lambda step: F.mse_loss(model(users, items, offsets), ratings))


def sn_gan(torch, begin):
    nn = torch.nn
    older, newer = nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm
    critic = begin(
        nn.Sequential(
            older(nn.Conv2d(1, 4, 3, 2, 1)), nn.LeakyReLU(0.1), newer(nn.Conv2d(4, 4, 3, 1, 1)), nn.LeakyReLU(0.1),
            nn.Flatten(), older(nn.Linear(64, 1)),
        )
    )  # fmt: skip
    seen = []
    handle = critic[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].sum().item()))

    def loss_of(step):
        real, fake = (data(torch, 3, 1, 8, 8, seed=10 * step + i) for i in range(2))
        return torch.relu(1 - critic(real)).mean() + torch.relu(1 + critic(fake)).mean()

    losses = train(torch.optim.Adam(critic.parameters(), lr=1e-2), loss_of)
    handle.remove()
    assert len(seen) == 6
    return losses + seen


PROGRAMS = (
    dcgan, lstm_tagger, transformer_classifier, vae, siamese, wgan_gp, u_net, char_rnn, matrix_factorisation, sn_gan,
)  # fmt: skip
