"""A GAN with two models, two optimizers and a gradient penalty, captured by `braze.capture`.

    python examples/wgan_gp.py [--smoke | --compare]

A call trains the critic five times, each on images of its own and with the gradient of a gradient,
and then the generator once: one CUDA graph. The images are synthetic: bright discs.

Paper: I. Gulrajani et al., "Improved Training of Wasserstein GANs" (2017).
"""

import torch
from loop import Loop, main
from torch import nn

import braze

LATENT, PENALTY, RATE, CRITIC_STEPS = 64, 10.0, 1e-4, 5


def make_generator(width):
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 4 * width, 4),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, 2, 1),
        nn.Tanh(),
    )


def make_critic(width):
    """Without batch norm: the penalty is one of each image by itself."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4 * width, 1, 4),
        nn.Flatten(0),
    )


def discs(count, device):
    """Images [count, 1, 32, 32] from -1 to 1 of one disc each."""
    grid = torch.arange(32, device=device)
    x, y = (torch.randint(10, 22, (count, 1, 1), device=device) for _ in range(2))
    radius = torch.randint(4, 9, (count, 1, 1), device=device)
    inside = (grid - x) ** 2 + (grid[:, None] - y) ** 2 < radius**2
    return inside.float().mul(2).sub(1).unsqueeze(1)


def build(device, smoke=False, stock=False):
    width, batch_size, steps = (8, 8, 15) if smoke else (64, 64, 200)
    torch.manual_seed(1)
    generator, critic = make_generator(width).to(device), make_critic(width).to(device)
    if not stock:
        generator, critic = braze.convert(generator), braze.convert(critic)
    rate = 10 * RATE if smoke else RATE
    settings = {"lr": rate, "betas": (0.0, 0.9), "fused": True, "capturable": device == "cuda"}
    adam = (torch if stock else braze).optim.Adam
    for_generator = adam(generator.parameters(), **settings)
    for_critic = adam(critic.parameters(), **settings)

    def noise(count):
        return torch.randn(count, LATENT, 1, 1, device=device)

    def critic_objective(real):
        with torch.no_grad():
            made = generator(noise(len(real)))
        share = torch.rand(len(real), 1, 1, 1, device=device)
        between = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
        distance = critic(real).mean() - critic(made).mean()
        return PENALTY * penalty - distance, distance

    def generator_objective(count):
        return -critic(generator(noise(count))).mean()

    if stock:
        # torch.compile does not differentiate twice: it compiles what has no penalty in it.
        generator_objective = torch.compile(generator_objective)

    def train(real):
        """real: [CRITIC_STEPS, batch, 1, 32, 32]"""
        for images in real.unbind():
            loss, distance = critic_objective(images)
            for_critic.zero_grad()
            loss.backward()
            for_critic.step()
        generator_loss = generator_objective(real.size(1))
        for_generator.zero_grad()  # the critic gets gradients too, and drops them above
        generator_loss.backward()
        for_generator.step()
        return loss, distance, generator_loss

    images = discs(4096 if not smoke else 256, device)

    def batch(_):
        chosen = torch.randint(len(images), (CRITIC_STEPS, batch_size), device=device)
        return (images[chosen],)

    return Loop(train, batch, lambda i: None, steps)


if __name__ == "__main__":
    main(build, __doc__)
